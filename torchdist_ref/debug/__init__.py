"""Debugging aids of process groups: debug levels, checked collectives and monitored barriers.

Backend `ref` finds mismatched collectives without these aids, in `backends.ref.handshake`.
"""
