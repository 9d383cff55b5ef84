"""Attention on a shard: what is attended (``forms``), how the group shares it (``strategies``), who decides
(``choose``).
"""
