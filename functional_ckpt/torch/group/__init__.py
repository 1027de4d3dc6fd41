"""Process groups of torch as `Gather`, over connections that are independent of the group's own."""
