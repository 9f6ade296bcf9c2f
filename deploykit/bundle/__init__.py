"""What travels: the archive, its files, their revision, and secrets that must stay."""
