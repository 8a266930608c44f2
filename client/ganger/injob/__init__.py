"""What runs in the user's interpreter, and what the daemon shares with it: pages, the boundary rule, the launcher."""
