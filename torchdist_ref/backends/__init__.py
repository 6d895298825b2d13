"""Backends: what carries out calls. Found by name through `base`, loaded when first asked for."""
