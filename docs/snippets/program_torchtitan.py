# --8<-- [start:install]
# In place of `-m torchtitan.train`: a script of these lines, then `from torchtitan.train import main; main()`.
from functional_ckpt import LoadPolicy
from functional_ckpt.torch import install

installed = install(load_policy=LoadPolicy(cast="same_kind"))
# --8<-- [end:install]
