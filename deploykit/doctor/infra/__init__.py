"""The infrastructure that a job requires, rendered from a few answers: stack, cluster, image."""
