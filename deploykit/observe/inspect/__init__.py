"""Where the ranks of a run stand: dumps that the nodes wrote, read and merged."""
