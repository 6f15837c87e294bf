"""Every touch of PyTorch that is not public. Nothing else in recoup imports a ``torch._`` module.

Each function says which upstream behaviour it stands on; the tests pass on the oldest and the newest supported torch.
"""
