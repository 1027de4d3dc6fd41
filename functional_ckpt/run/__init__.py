"""What conducts a save and a load: capture, agree, plan, stage, write, publish; open, plan, read, fill."""
