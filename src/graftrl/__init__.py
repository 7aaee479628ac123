"""graftrl: cross-model RL post-training.

Several language models train by reinforcement learning on verifiable rewards and learn from each other's rollouts.
"""

__version__ = "0.1.0"
