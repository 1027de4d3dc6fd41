"""The steps of a save (capture, agree, plan, begin, write, publish) and of a load (open, plan, agree, read, fill).

`async_save` stages, that is copies, what it will write between begin and write.
"""
