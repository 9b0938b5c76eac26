"""What an optimizer is: its update and what that keeps of each weight, whatever the ranks."""
