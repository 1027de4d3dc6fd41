"""What is held: boxes, shards, worlds and trees. Pure values; imports only attrs and numpy."""
