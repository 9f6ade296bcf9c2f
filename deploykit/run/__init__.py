"""One run's life, and all that is known of it."""
