"""Matrix products with packed weights; one module per weight type."""
