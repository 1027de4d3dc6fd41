"""What moves: layouts, save plans, load plans and the manifest. Pure functions from specs to values."""
