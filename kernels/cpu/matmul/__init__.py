"""Products of rows with a weight matrix laid out once; a module for each form of weights."""
