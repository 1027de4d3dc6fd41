# --8<-- [start:tree]
functional-ckpt tree checkpoint
# --8<-- [end:tree]
# --8<-- [start:ls]
functional-ckpt ls checkpoint --prefix model
# --8<-- [end:ls]
# --8<-- [start:show]
functional-ckpt show checkpoint model.w --slice ":2, ::2"
# --8<-- [end:show]
# --8<-- [start:verify]
functional-ckpt verify checkpoint
# --8<-- [end:verify]
