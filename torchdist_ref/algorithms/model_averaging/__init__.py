"""Model averaging: ranks train by themselves for some steps, then average their parameters; see `averagers`.

Do not add the exchange of gradients here: it belongs to communication hooks.
"""
