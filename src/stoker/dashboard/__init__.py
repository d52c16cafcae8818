"""Dashboard: run folders as web pages and as an API."""
