"""What a job may cost and what it did cost. Each backend says for what time and price (`cost`)."""
