"""What each command of ``pagedjax`` does, one module each; imported when the command runs."""
