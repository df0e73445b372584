"""What notebooks show and check: parameters, progress, records."""
