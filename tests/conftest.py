"""What every test gets."""
