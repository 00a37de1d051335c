"""One attempt at a request, as gateway and workers speak of it: what is asked, and what is answered."""
