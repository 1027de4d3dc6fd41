"""What people see: text, trees, HTML and the bar of a long call. The tables of the commands are in `cli`."""
