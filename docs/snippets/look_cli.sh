# --8<-- [start:ls]
functional-ckpt ls checkpoint
# --8<-- [end:ls]
# --8<-- [start:show]
functional-ckpt show checkpoint model.w
# --8<-- [end:show]
# --8<-- [start:verify]
functional-ckpt verify checkpoint
# --8<-- [end:verify]
