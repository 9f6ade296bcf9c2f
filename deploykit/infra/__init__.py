"""What must exist before a job can run, from a few answers: a stack, a cluster, an image."""
