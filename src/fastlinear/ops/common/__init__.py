"""What two or more families share."""
