"""Store the fleet's reports in SQLite or PostgreSQL, each once, and query them."""
