"""The fleet by its reports: the live state, the store and its queries, exports, and the web page."""
