"""What this project takes of a machine, alone and beside others."""
