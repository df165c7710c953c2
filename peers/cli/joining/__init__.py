"""What `meshcee peer` does around the peer itself: say what was joined, find a mesh on this network, be a service, yield."""
