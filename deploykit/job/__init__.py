"""What a user writes: the job, its file, its environment, and the checks of them."""
