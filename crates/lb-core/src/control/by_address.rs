//! Values keyed by address, sorted in one allocation: the daemon reads these maps for all services
//! every second, but rarely changes them.

use std::net::SocketAddr;

/// A map from addresses to values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByAddress<V>(Vec<(SocketAddr, V)>);

impl<V> Default for ByAddress<V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

/// The position after the value that the last look-up found. The next look-up begins there. A
/// look-up of the next address in order is therefore cheap.
#[derive(Clone, Copy, Debug, Default)]
pub struct Next(usize);

impl<V> ByAddress<V> {
    fn at(&self, address: &SocketAddr) -> Result<usize, usize> {
        self.0.binary_search_by(|(known, _)| known.cmp(address))
    }

    /// Whether an address has a value.
    pub fn contains_key(&self, address: &SocketAddr) -> bool {
        self.at(address).is_ok()
    }

    /// The value of an address.
    pub fn get(&self, address: &SocketAddr) -> Option<&V> {
        self.at(address).ok().map(|at| &self.0[at].1)
    }

    /// The mutable value of an address.
    pub fn get_mut(&mut self, address: &SocketAddr) -> Option<&mut V> {
        self.at(address).ok().map(|at| &mut self.0[at].1)
    }

    /// Like [`ByAddress::get`], but fast if the address follows the address of the last look-up.
    pub fn get_next(&self, next: &mut Next, address: &SocketAddr) -> Option<&V> {
        self.at_next(next, address).map(|at| &self.0[at].1)
    }

    /// Like [`ByAddress::get_next`], but the value is mutable.
    pub fn get_next_mut(&mut self, next: &mut Next, address: &SocketAddr) -> Option<&mut V> {
        self.at_next(next, address).map(|at| &mut self.0[at].1)
    }

    fn at_next(&self, Next(next): &mut Next, address: &SocketAddr) -> Option<usize> {
        let is_next = self.0.get(*next).is_some_and(|(known, _)| known == address);
        let at = if is_next { *next } else { self.at(address).ok()? };
        *next = at + 1;
        Some(at)
    }

    /// Inserts a value, or replaces the value of its address. Insertion takes linear time.
    pub fn insert(&mut self, address: SocketAddr, value: V) {
        match self.at(&address) {
            Ok(at) => self.0[at].1 = value,
            Err(at) => self.0.insert(at, (address, value)),
        }
    }

    /// Removes the value of an address, and returns it.
    pub fn remove(&mut self, address: &SocketAddr) -> Option<V> {
        self.at(address).ok().map(|at| self.0.remove(at).1)
    }

    /// All values, in the order of their addresses.
    pub fn iter(&self) -> impl Iterator<Item = (&SocketAddr, &V)> + Clone {
        self.0.iter().map(|(address, value)| (address, value))
    }

    /// The addresses, in their order.
    pub fn keys(&self) -> impl Iterator<Item = &SocketAddr> + Clone {
        self.0.iter().map(|(address, _)| address)
    }

    /// The values, in the order of their addresses.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.0.iter().map(|(_, value)| value)
    }

    /// The mutable values, in the order of their addresses.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.0.iter_mut().map(|(_, value)| value)
    }

    /// Removes the values for which the closure returns false.
    pub fn retain(&mut self, mut is_retained: impl FnMut(&SocketAddr, &mut V) -> bool) {
        self.0.retain_mut(|(address, value)| is_retained(address, value));
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<V> FromIterator<(SocketAddr, V)> for ByAddress<V> {
    /// If an address has several values, the last value is used.
    fn from_iter<I: IntoIterator<Item = (SocketAddr, V)>>(values: I) -> Self {
        let mut values: Vec<(SocketAddr, V)> = values.into_iter().collect();
        if !values.is_sorted_by(|(a, _), (b, _)| a < b) {
            // The sort is stable, and the deduplication retains the first of equal addresses, which
            // was the last before the list was reversed.
            values.reverse();
            values.sort_by_key(|(address, _)| *address);
            values.dedup_by(|(later, _), (first, _)| later == first);
        }
        Self(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    #[test]
    fn values_by_address_behave_like_a_map() {
        let mut map: ByAddress<u32> =
            [(3, 30), (1, 10), (3, 31), (2, 20)].map(|(at, is)| (address(at), is)).into_iter().collect();
        assert_eq!(map.values().copied().collect::<Vec<_>>(), [10, 20, 31]);
        map.insert(address(2), 21);
        map.insert(address(0), 1);
        assert_eq!((map.get(&address(2)), map.get(&address(9)), map.len()), (Some(&21), None, 4));
        // Look-ups work in any order.
        let mut next = Next::default();
        let found = [0, 1, 3, 9, 2, 3, 0].map(|at| map.get_next(&mut next, &address(at)).copied());
        assert_eq!(found, [Some(1), Some(10), Some(31), None, Some(21), Some(31), Some(1)]);
        assert_eq!(map.get_next_mut(&mut next, &address(1)), Some(&mut 10));
        assert_eq!((map.remove(&address(1)), map.remove(&address(1))), (Some(10), None));
        map.retain(|_, value| *value > 1);
        *map.get_mut(&address(3)).unwrap() += 1;
        assert_eq!(map.iter().map(|(at, is)| (at.port(), *is)).collect::<Vec<_>>(), [(2, 21), (3, 32)]);
        assert!(!map.is_empty() && ByAddress::<u32>::default().is_empty());
    }
}
