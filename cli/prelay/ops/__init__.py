"""What the person on call asks a running fleet, and tells it: through the admin routes of any of its API processes."""
