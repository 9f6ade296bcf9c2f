"""How the nodes of a job reach each other: interfaces, addresses, and the rendezvous."""
