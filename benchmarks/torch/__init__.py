"""Training steps on a GPU: is the budget held, and what does it cost beside what PyTorch offers?"""
