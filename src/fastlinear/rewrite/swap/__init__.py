"""What is put in place of a module's ``forward``, when it may run, and the way back."""
