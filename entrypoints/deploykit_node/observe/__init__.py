"""Looking into the ranks of this node while they run, without a change to the program."""
