"""The test bed: real servers, real API and worker processes, a null model and clients that check every token."""
