"""The steps of a save (capture, agree, plan, stage, write, publish) and of a load (open, plan, agree, read, fill)."""
