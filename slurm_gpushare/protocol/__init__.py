"""What all five programs agree on, said once."""
