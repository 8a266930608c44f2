"""What command modules print: tables, JSON, colours. Everything heavy is imported when something is drawn."""
