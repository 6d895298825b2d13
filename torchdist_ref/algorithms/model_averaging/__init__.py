"""Model averaging: ranks train by themselves for some steps, then take the average of their parameters.

`averagers` says when, `hierarchical_model_averager` when and with whom, `utils` does it. What happens to gradients in
between is for a communication hook to say.
"""
