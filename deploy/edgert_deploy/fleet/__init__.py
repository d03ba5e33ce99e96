"""The fleet from its reports: the live state, the store and its queries, exports, and the web page."""
