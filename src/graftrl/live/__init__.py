"""Live peers: jobs that train one side each and hand each other the groups of every step.

    job of A                          where they meet                         job of B
    publish A's step 7  ─────▶  {A: {6, 7}, B: {6, 7}}  ◀─────  publish B's step 7
    fetch B's step 7    ◀─────   a folder, or a Ray actor  ─────▶  fetch A's step 7

What is published is one Parquet file a model and step, in the form of a rollout log: text, token ids, generation
log-probabilities, rewards, and how they came about. Nothing else passes, and no job needs another to go on.
"""
