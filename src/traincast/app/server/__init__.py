"""The results as a web server: the same pages live, and a REST API."""
