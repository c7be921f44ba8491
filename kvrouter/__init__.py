"""A front door for fleets of vLLM servers that routes each prompt to where its prefix is cached."""
