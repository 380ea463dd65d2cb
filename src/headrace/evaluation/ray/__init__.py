"""Evaluation over many processes and machines, with Ray (extra ``ray``)."""
