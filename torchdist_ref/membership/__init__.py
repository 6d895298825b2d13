"""Membership: who belongs to a job and to a group, who has left or failed, and who may speak for whom."""
