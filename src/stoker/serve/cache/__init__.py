"""The caching proxy: origins, slices on disk, and warming."""
