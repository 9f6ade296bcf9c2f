"""What a run says about its speed."""
