"""The OpenAI API as the router sees it: which paths there are and what of a body it reads."""
