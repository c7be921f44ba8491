"""The data plane: client side, engine side, and the life of one request between them.

This is the only room that knows the HTTP library.
"""
